// Clients of JavaScript, as their documentation shows them. Writes what they return as one line of JSON.
// Arguments: the server's address, a folder with node_modules, the name of the client.
import { createRequire } from 'node:module';
import path from 'node:path';

const [base, folder, which] = process.argv.slice(2);
const require = createRequire(path.join(path.resolve(folder), 'x.js'));
const { z } = require('zod');
const model = 'tiny';
const ASK = 'How is the weather in Paris?';
const OBJECT = 'Name a city as an object.';
const PARAMETERS = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] };
const City = z.object({ city: z.string() });
const look = async ({ city }) => `sunny in ${city}`;
const said = (content) => [{ role: 'user', content }];

async function openai() {
  const OpenAI = require('openai').default;
  const { zodResponseFormat, zodTextFormat } = require('openai/helpers/zod');
  const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: 'none', maxRetries: 0 });
  const got = {};
  got.chat = (await client.chat.completions.create({ model, messages: said('Hello') })).choices[0].message.content;
  got.stream = '';
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create({ model, messages: said('Hello'), ...options })) {
    got.stream += chunk.choices[0]?.delta?.content ?? '';
  }
  const run = client.chat.completions.runTools({
    model, messages: said(ASK),
    tools: [{
      type: 'function',
      function: { name: 'weather', description: 'The weather.', parameters: PARAMETERS, parse: JSON.parse, function: look },
    }],
  });
  got.loop = await run.finalContent();
  got.roles = run.messages.map((message) => message.role);
  const format = zodResponseFormat(City, 'city');
  const parsed = await client.chat.completions.parse({ model, messages: said(OBJECT), response_format: format });
  got.object = parsed.choices[0].message.parsed;
  const response = await client.responses.create({ model, input: 'Hello' });
  const next = await client.responses.create({ model, input: 'And?', previous_response_id: response.id });
  got.responses = [response.output_text, next.output_text];
  const streamed = await client.responses.stream({ model, input: 'Hello' }).finalResponse();
  got.responseStream = [streamed.status, streamed.output_text];
  const text = { format: zodTextFormat(City, 'city') };
  got.responseObject = (await client.responses.parse({ model, input: OBJECT, text })).output_parsed;
  got.completion = (await client.completions.create({ model, prompt: 'Hello' })).choices[0].text;
  got.error = await client.chat.completions.create({ model: 'other', messages: said('Hello') }).catch(
    (error) => [error.constructor.name, error.status, error.param]);
  got.models = (await client.models.list()).data.map((card) => card.id);
  return got;
}

async function anthropic() {
  const Anthropic = require('@anthropic-ai/sdk').default;
  const { betaZodTool } = require('@anthropic-ai/sdk/helpers/beta/zod');
  const client = new Anthropic({ baseURL: base, apiKey: 'none', maxRetries: 0 });
  const fields = { model, max_tokens: 100 };
  const got = {};
  got.chat = (await client.messages.create({ ...fields, messages: said('Hello') })).content[0].text;
  got.stream = (await client.messages.stream({ ...fields, messages: said('Hello') }).finalMessage()).content[0].text;
  const tool = betaZodTool({ name: 'weather', description: 'The weather.', inputSchema: City, run: look });
  got.loop = (await client.beta.messages.toolRunner({ ...fields, messages: said(ASK), tools: [tool] })).content[0].text;
  got.error = await client.messages.create({ ...fields, model: 'other', messages: said('Hello') }).catch(
    (error) => [error.constructor.name, error.status]);
  return got;
}

async function sdk(kind) {
  const ai = require('ai');
  const settings = { baseURL: `${base}/v1`, apiKey: 'none' };
  const made = {
    compatible: () => require('@ai-sdk/openai-compatible').createOpenAICompatible({
      ...settings, name: 'quire', includeUsage: true, supportsStructuredOutputs: true,
    })(model),
    chat: () => require('@ai-sdk/openai').createOpenAI(settings).chat(model),
    responses: () => require('@ai-sdk/openai').createOpenAI(settings)(model),
    messages: () => require('@ai-sdk/anthropic').createAnthropic(settings)(model),
  }[kind]();
  const fixed = { model: made, maxRetries: 0, maxOutputTokens: 100 };
  const fail = ({ error }) => { throw error; };
  const tools = { weather: ai.tool({ description: 'The weather.', inputSchema: City, execute: look }) };
  const loop = { ...fixed, prompt: ASK, tools, stopWhen: ai.stepCountIs(3) };
  const got = {};
  const whole = await ai.generateText({ ...fixed, prompt: 'Hello' });
  got.chat = whole.text;
  got.reason = whole.finishReason;
  got.counted = whole.usage.inputTokens > 0 && whole.usage.outputTokens > 0;
  const stream = ai.streamText({ ...fixed, prompt: 'Hello', onError: fail });
  got.stream = '';
  for await (const piece of stream.textStream) got.stream += piece;
  const looped = await ai.generateText(loop);
  got.loop = looped.text;
  got.results = looped.steps.flatMap((step) => step.toolResults.map((result) => result.output));
  const again = [...said(ASK), ...looped.response.messages, ...said('And now?')];
  const { prompt, ...rest } = loop;
  got.again = (await ai.generateText({ ...rest, messages: again })).text;
  const streamed = ai.streamText({ ...loop, onError: fail });
  await streamed.consumeStream();
  got.streamedLoop = await streamed.text;
  if (kind !== 'messages') {
    const output = ai.Output.object({ schema: City });
    got.object = (await ai.generateText({ ...fixed, prompt: OBJECT, output })).output;
  }
  return got;
}

const clients = { openai, anthropic };
console.log(JSON.stringify(await (which in clients ? clients[which]() : sdk(which))));
